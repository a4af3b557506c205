"""The protocol of sites, whatever carries its messages."""
