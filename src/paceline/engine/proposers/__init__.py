"""What drafts tokens on this machine: prompt lookup, a draft model token by token, a model that refines whole blocks."""
