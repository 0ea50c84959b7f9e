"""best fit"""


def priority(item, room):
    return item - room
