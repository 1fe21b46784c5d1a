//! VHDX.
