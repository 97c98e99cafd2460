# kubernetes_train.py
import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.demo.digits import DigitsClassifier, DigitsData
from fabricx.launchers import Kubernetes

launcher = Kubernetes("registry.example/train:1", volumes={"shared": "/shared"}, cpus_per_rank=6)  # in /shared/project
trainer = fx.Trainer(
    launcher=launcher, num_nodes=2, devices=8, accelerator="gpu", max_epochs=2, callbacks=[FaultRecovery()]
)
trainer.fit(DigitsClassifier(), datamodule=DigitsData())
print(trainer.callback_metrics)
