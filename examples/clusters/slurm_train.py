# slurm_train.py
import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.demo.digits import DigitsClassifier, DigitsData
from fabricx.launchers import Slurm

launcher = Slurm("gpu", time_min=720, cpus_per_rank=6, options={"constraint": "a100"})  # or launcher="slurm"
trainer = fx.Trainer(
    launcher=launcher, num_nodes=2, devices=8, accelerator="gpu", max_epochs=2, callbacks=[FaultRecovery()]
)
trainer.fit(DigitsClassifier(), datamodule=DigitsData())
print(trainer.callback_metrics)
