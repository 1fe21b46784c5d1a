pub use x::create; mod x { }
