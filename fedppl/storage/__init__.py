"""What a run or a node keeps: written without code, signed with the owner's key, there as a whole or not at all."""
