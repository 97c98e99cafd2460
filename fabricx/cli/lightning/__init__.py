"""`LightningCLI`: runs that are built from command lines and YAML files by jsonargparse."""

try:
    import jsonargparse  # noqa: F401
except ImportError as error:
    raise ImportError(
        "LightningCLI needs the package jsonargparse: pip install 'fabricx[cli]'. Without it, the command `fabricx fit "
        "module._target_=my_project.Net module.lr=0.1` builds runs from configurations and options"
    ) from error
