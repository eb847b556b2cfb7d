"""Words on the socket between the main process and the gateway, of one byte each.

The end of the stream means that the other process is gone.
"""

#: The gateway serves; sent every second.
ALIVE = b"."
#: The gateway is to answer the requests in flight and end.
DRAIN = b"d"
