"""A model that is shared among devices: its processes, what they say to each other, copies in all of them."""
