"""`LightningCLI`: runs that are built from command lines and YAML files by jsonargparse."""
