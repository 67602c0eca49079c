"""Operations of the runtime: a reference in plain torch for each, and faster versions with the same signature."""
