"""A fleet without sockets: cards, gossip, trust decisions, links and placement as pure state machines. Time is an argument."""
