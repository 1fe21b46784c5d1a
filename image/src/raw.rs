//! A raw file or device as an image.
