"""Which optional packages are installed, under the names that projects import from Lightning's `utilities.imports`."""

from __future__ import annotations

from lightning_utilities.core.imports import RequirementCache as RequirementCache
from lightning_utilities.core.imports import compare_version as compare_version
from lightning_utilities.core.imports import module_available as module_available
from lightning_utilities.core.imports import package_available as package_available

_OMEGACONF_AVAILABLE = RequirementCache("omegaconf")
_RICH_AVAILABLE = RequirementCache("rich>=10.2.2")
_TORCHVISION_AVAILABLE = RequirementCache("torchvision")
_TORCHMETRICS_GREATER_EQUAL_0_8_0 = RequirementCache("torchmetrics>=0.8.0")
_TORCHMETRICS_GREATER_EQUAL_0_9_1 = RequirementCache("torchmetrics>=0.9.1")
_TORCHMETRICS_GREATER_EQUAL_0_11 = RequirementCache("torchmetrics>=0.11.0")
_TORCHMETRICS_GREATER_EQUAL_1_0_0 = RequirementCache("torchmetrics>=1.0.0")
