"""Pages of `fabricx report`: templates, charts, and the script of their interaction."""

from typing import Final

LIBRARY: Final = "uPlot-1.6.32.min.js"  # https://github.com/leeoniya/uPlot, unchanged; its license is beside it
