"""Files that a run or a node keeps: written without code, signed with the owner's key, replaced as a whole."""
