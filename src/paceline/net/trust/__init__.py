"""Membership of the fleet, and how a node proves it."""
