"""Run layers on this machine."""
