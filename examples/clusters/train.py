# train.py
import fabricx as fx
from fabricx.demo.digits import DigitsClassifier, DigitsData

trainer = fx.Trainer(devices="auto", num_nodes=1, max_epochs=2)
trainer.fit(DigitsClassifier(), datamodule=DigitsData())
trainer.print(trainer.callback_metrics)
