//! Builds the C half of the sampler, which writes the stream and shares sources with the other engines.

fn main() {
    println!("cargo::rerun-if-changed=../recorder/engines");
    if std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("x86_64") {
        cc::Build::new()
            .file("../recorder/engines/native/pagetax.c")
            .flag("-fno-strict-aliasing")
            // The C code runs while vector registers have the program's values.
            .flag("-mgeneral-regs-only")
            .opt_level(2)
            .compile("pagetax_native");
    }
}
