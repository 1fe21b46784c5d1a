//! VHD.
