"""What happened, drawn: a timeline of the nodes, the waterfall of a recovery, and the page around them."""
