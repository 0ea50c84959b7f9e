def priority(item, room):
    """Return the priority of a bin with free space `room` for an item of size `item`, where room >= item."""
    left = room - item  # the free space after the item is added
    return -left
