"""What a cell is: from the text that was typed to a request that a rank can run."""
