"""`coppice bench services`: what the services alone cost, on a target and a head that sleep instead of computing."""
