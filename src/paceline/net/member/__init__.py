"""This node as a member of its fleet: gossip, links, trust and its port, at work."""
