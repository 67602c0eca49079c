"""Reference of every operation in plain torch, on any device and in any dtype; faster versions must agree with it."""
