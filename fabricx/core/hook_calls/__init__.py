"""Which hooks and steps of the user's objects the loop calls, and with which arguments."""
