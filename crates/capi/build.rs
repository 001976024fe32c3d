//! The name by which programs ask for the library: as long as the first number of its version stays,
//! they need not be linked again.

fn main() {
    let major = std::env::var("CARGO_PKG_VERSION_MAJOR").unwrap_or_default();
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpagetax.so.{major}");
    println!("cargo::rerun-if-changed=build.rs");
}
