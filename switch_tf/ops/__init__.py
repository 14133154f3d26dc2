"""Operations of layers, with an implementation for each device, dtype and layout."""
