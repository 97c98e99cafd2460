"""A parameter server: state machine, update rules, process."""
