"""Reference version of every operation in plain torch, for any device and dtype; faster versions must agree with it."""
