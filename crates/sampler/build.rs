//! Compiles the half of the sampler that writes the stream, in the C that the other engines share.

fn main() {
    println!("cargo::rerun-if-changed=../recorder/engines");
    if std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("x86_64") {
        cc::Build::new()
            .file("../recorder/engines/native/pagetax.c")
            .flag("-fno-strict-aliasing")
            // It runs while the program has its vector registers.
            .flag("-mgeneral-regs-only")
            .opt_level(2)
            .compile("pagetax_native");
    }
}
