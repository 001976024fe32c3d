//! Puts the libraries of other crates into a program.
//!
//! Cargo builds every crate type of a dependency, a shared library or an archive too, before it compiles a
//! program. So no second build is needed: the macro takes the files that lie beside the dependency's rlib,
//! and cargo compiles the program again when one of them changes.

use proc_macro::{Literal, TokenStream, TokenTree};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The level of zstd: a sixth smaller than the best of zlib.
const LEVEL: i32 = 19;

/// Expands to `&[CarriedLibrary { name, hash, bytes, compressed }, …]` for the named files, such as
/// `"libpagetax_preload.so"`: each without debug information, with its XXH3-64 and its length,
/// compressed by zstd.
/// Expands to an empty slice under `cargo check`, which builds no libraries.
///
/// # Panics
/// If a dependency or its library is missing, or objcopy fails. The message is a compiler error.
#[proc_macro]
pub fn libraries(names: TokenStream) -> TokenStream {
    let names = names.into_iter().filter_map(|token| match token {
        TokenTree::Literal(name) => Some(name.to_string().trim_matches('"').to_owned()),
        _ => None,
    });
    let libraries = names.filter_map(|name| {
        let content = stripped(&built(&name)?);
        let hash = twox_hash::XxHash3_64::oneshot(&content);
        let bytes = content.len();
        let compressed = zstd::bulk::compress(&content, LEVEL).expect("memory takes it");
        let compressed = Literal::byte_string(&compressed);
        Some(format!(
            "CarriedLibrary {{ name: {name:?}, hash: {hash}, bytes: {bytes}, compressed: {compressed} }},"
        ))
    });
    format!("&[{}]", libraries.collect::<String>()).parse().expect("the text is Rust")
}

/// Returns the path of a library that cargo built; `None` if cargo only checks.
fn built(name: &str) -> Option<PathBuf> {
    let (stem, extension) = name.split_once('.').expect("a file name has an extension");
    let option = format!("{}=", stem.trim_start_matches("lib"));
    // Cargo tells the compiler where each dependency is: `--extern NAME=PATH`.
    let found = std::env::args().find_map(|argument| Some(argument.strip_prefix(&option)?.into()));
    let dependency: PathBuf =
        found.unwrap_or_else(|| panic!("{name}: its crate is no dependency of this one"));
    dependency.extension().is_some_and(|it| it == "rlib").then(|| {
        let library = dependency.with_extension(extension);
        assert!(library.is_file(), "cargo built no {}", library.display());
        library
    })
}

/// Returns the content of a library without the parts that no loader or linker needs.
fn stripped(library: &Path) -> Vec<u8> {
    let is_archive = library.extension().is_some_and(|extension| extension == "a");
    // Rust's own libraries bring LLVM's bitcode, which is most of an archive.
    let options: &[&str] = match is_archive {
        true => &["--strip-debug", "-R", ".llvmbc", "-R", ".llvmcmd"],
        false => &["--strip-all"],
    };
    let result = library.with_extension(format!("stripped-{}", std::process::id()));
    let status = Command::new("objcopy").args(options).arg(library).arg(&result).status();
    let status = status.unwrap_or_else(|error| {
        panic!("cannot run objcopy: {error}; install binutils, which comes with gcc")
    });
    assert!(status.success(), "objcopy {}: {status}", library.display());
    let content = fs::read(&result).expect("objcopy wrote its result");
    fs::remove_file(&result).expect("the directory is cargo's own");
    content
}
