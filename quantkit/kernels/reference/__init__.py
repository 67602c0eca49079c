"""Every operation in plain torch, on any device and in any dtype: what each faster version must agree with."""
