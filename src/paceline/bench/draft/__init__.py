"""`paceline bench speculate`: what drafts gain and cost, on texts that ship with it, with every byte compared."""
