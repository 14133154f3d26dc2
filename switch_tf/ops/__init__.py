"""Operations that layers share, with an implementation for each device, dtype and layout."""
