# sagemaker_launch.py, with version 2 of the SDK
import secrets

from sagemaker.inputs import FileSystemInput
from sagemaker.pytorch import PyTorch

estimator = PyTorch(
    entry_point="train.py",
    source_dir="project",  # train.py, fabricx-0.1.0-py3-none-any.whl, and its name in requirements.txt
    image_uri="ACCOUNT.dkr.ecr.REGION.amazonaws.com/train:1",  # PyTorch 2.11 or later
    role="arn:aws:iam::ACCOUNT:role/train",
    instance_count=2,  # = num_nodes
    instance_type="ml.p4d.24xlarge",
    distribution={"torch_distributed": {"enabled": True}},
    environment={"FABRICX_KEY": secrets.token_hex(32)},
    subnets=["subnet-1"],
    security_group_ids=["sg-1"],
)
estimator.fit({"shared": FileSystemInput("fs-1", "FSxLustre", "/fsx/project", "rw")})
