"""Where what should be: hardware, models, layouts, what they cost, and the search for the best."""
