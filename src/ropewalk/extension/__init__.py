"""A model evaluated beyond its trained length, unchanged and with each way to stretch it: `ropewalk extend`."""
