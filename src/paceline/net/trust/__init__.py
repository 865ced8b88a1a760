"""Who belongs to the fleet, and how that is proved."""
