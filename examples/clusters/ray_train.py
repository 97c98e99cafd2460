# ray_train.py
import fabricx as fx
from fabricx.demo.digits import DigitsClassifier, DigitsData
from fabricx.launchers import Ray

launcher = Ray(cpus_per_rank=6)  # or launcher="ray"
trainer = fx.Trainer(launcher=launcher, num_nodes=4, devices=8, accelerator="gpu", max_epochs=2)
trainer.fit(DigitsClassifier(), datamodule=DigitsData())
print(trainer.callback_metrics)
