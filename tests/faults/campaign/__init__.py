"""The fault campaign: real processes under load, one fault after another, every answer compared with plain decoding."""
