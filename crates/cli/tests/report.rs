//! `pagetax report`: a page gives its documents back byte for byte, and what is no document is refused.

use std::path::Path;
use std::process::{Command, Output, Stdio};

fn report(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.arg("report").args(args).current_dir(folder).stdin(Stdio::null());
    command.output().unwrap()
}

fn examples() -> Vec<std::path::PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema/examples");
    let mut files: Vec<_> = folder.read_dir().unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn every_kind_of_document_comes_back_from_its_page() {
    let folder = tempfile::tempdir().unwrap();
    let files = examples();
    assert!(files.len() > 15, "{files:?}");
    let args: Vec<&str> = files.iter().map(|path| path.to_str().unwrap()).collect();
    let made = report(folder.path(), &args);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let back = report(folder.path(), &["report.html", "--json"]);
    let all: Vec<u8> = files.iter().flat_map(|path| std::fs::read(path).unwrap()).collect();
    assert!(back.status.success() && back.stdout == all);
    // A page of a page is the same page.
    let again = report(folder.path(), &["report.html", "-o", "-"]);
    assert!(again.stdout == std::fs::read(folder.path().join("report.html")).unwrap());
}

#[test]
fn what_is_no_document_is_refused_and_no_file_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let example = examples().remove(0);
    let whole = std::fs::read_to_string(&example).unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    write("cut.json", &whole[..whole.len() / 2]);
    write("newer.json", r#"{"schema": 2, "kind": "run"}"#);
    write("foreign.json", r#"{"a": 1}"#);
    write("empty.json", "");
    write("notes.txt", "mine");
    for (name, part) in [
        ("cut.json", "not a document of pagetax: EOF"),
        ("newer.json", "newer than this pagetax"),
        ("foreign.json", "states no kind"),
        ("empty.json", "an empty file"),
        ("absent.json", "cannot read absent.json"),
    ] {
        let output = report(folder, &[name]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name}: {errors}");
        assert!(errors.contains(part), "{name}: {errors}");
    }
    assert!(!folder.join("report.html").exists());
    let example = example.to_str().unwrap();
    let kept = report(folder, &[example, "-o", "notes.txt"]);
    assert_eq!(kept.status.code(), Some(2));
    assert_eq!(std::fs::read_to_string(folder.join("notes.txt")).unwrap(), "mine");
    assert!(report(folder, &[example]).status.success());
    assert!(report(folder, &[example]).status.success(), "a page of ours is replaced");
    let page = std::fs::read_to_string(folder.join("report.html")).unwrap();
    write("damaged.html", &page.replace("H4sI", "H4sJ"));
    let damaged = report(folder, &["damaged.html", "--json"]);
    let errors = String::from_utf8_lossy(&damaged.stderr);
    assert!(errors.contains("the page is damaged"), "{errors}");
}
