"""What `fedsi.py` is made of: the paper's figures, who holds what, fits of one partition, and what is told of them."""
