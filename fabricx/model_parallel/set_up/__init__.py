"""Set-up of a mesh: a module is divided by trial runs, and compared with the undivided module."""
