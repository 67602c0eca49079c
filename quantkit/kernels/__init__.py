"""Operations of the runtime: a plain reference for each, and faster versions beside it behind the same signature."""
