"""Operations of layers for each device, dtype and layout."""
