//! Names of functions, from the symbol tables of mapped files, and source lines, from their debug information
//! or that of Debian's -dbgsym packages.
//!
//! Invariant: each file is read once, even if it cannot be read or has no symbols.

use crate::places::AddressSpace;
use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind};
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;

/// The function and file of an instruction.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Function {
    /// The demangled name; none if the file has no symbol there, and for generated code.
    pub name: Option<String>,
    /// The path of the file; none for generated code.
    pub file: Option<Rc<str>>,
}

/// A line of source code.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceLine {
    /// The path of the source file, as the compiler had it.
    pub file: String,
    /// The number of the line, from 1.
    pub line: u32,
}

/// The address in the file, the length and the name of a function.
type Symbol = (u64, u64, String);

/// The text symbols of one file.
#[derive(Default)]
struct SymbolTable {
    /// The symbols, in the order of addresses.
    symbols: Vec<Symbol>,
    /// Segments: file offset, length, address.
    segments: Vec<(u64, u64, u64)>,
    /// The debug information; none if there is none.
    lines: Option<addr2line::Loader>,
}

impl SymbolTable {
    fn read(path: &str) -> Option<SymbolTable> {
        let bytes = std::fs::read(path).ok()?;
        let file = object::File::parse(&*bytes).ok()?;
        let mut symbols: Vec<Symbol> = file
            .symbols()
            .chain(file.dynamic_symbols())
            .filter(|s| s.kind() == SymbolKind::Text && s.address() != 0)
            .filter_map(|s| Some((s.address(), s.size(), s.name().ok()?.to_string())))
            .collect();
        symbols.sort();
        symbols.dedup_by_key(|(address, ..)| *address);
        let segments = file.segments().map(|segment| {
            let (offset, length) = segment.file_range();
            (offset, length, segment.address())
        });
        let lines = with_debug_info(path, &file).and_then(|path| addr2line::Loader::new(path).ok());
        Some(SymbolTable { symbols, segments: segments.collect(), lines })
    }

    /// Returns the address that the file itself gives to the byte at this offset.
    fn address(&self, offset: u64) -> Option<u64> {
        let mut segments = self.segments.iter();
        let (start, _, address) =
            segments.find(|(start, length, _)| (*start..start + length).contains(&offset))?;
        Some(offset - start + address)
    }

    fn line(&self, offset: u64) -> Option<SourceLine> {
        let location = self.lines.as_ref()?.find_location(self.address(offset)?).ok()??;
        Some(SourceLine { file: location.file?.into(), line: location.line? })
    }

    fn name(&self, offset: u64) -> Option<&str> {
        let at = self.address(offset)?;
        let after = self.symbols.partition_point(|(start, ..)| *start <= at);
        let (start, size, name) = self.symbols.get(after.checked_sub(1)?)?;
        // Assembly symbols often have no size: they end at the next one.
        (*size == 0 || at < start + size).then_some(name)
    }
}

/// Returns the file that has a program's debug information: itself, or the one of a -dbgsym package.
fn with_debug_info(path: &str, file: &object::File<'_>) -> Option<PathBuf> {
    if file.section_by_name(".debug_line").is_some() {
        return Some(path.into());
    }
    let id: String = file.build_id().ok()??.iter().map(|byte| format!("{byte:02x}")).collect();
    let (folder, rest) = id.split_at_checked(2)?;
    let path = PathBuf::from(format!("/usr/lib/debug/.build-id/{folder}/{rest}.debug"));
    path.exists().then_some(path)
}

/// A cache of symbol tables by file.
#[derive(Default)]
pub struct Symbols {
    tables: HashMap<Rc<str>, SymbolTable>,
}

impl Symbols {
    /// Returns the function that contains an instruction.
    pub fn function(&mut self, space: &AddressSpace, instruction: u64) -> Function {
        let Some((file, table, offset)) = self.find(space, instruction) else {
            return Function { name: None, file: None };
        };
        let name = table.name(offset);
        let name = name.map(|name| format!("{:#}", rustc_demangle::demangle(name)));
        Function { name, file: Some(file) }
    }

    /// Returns the source line of an instruction; of inlined code, that of the innermost function.
    pub fn line(&mut self, space: &AddressSpace, instruction: u64) -> Option<SourceLine> {
        let (_, table, offset) = self.find(space, instruction)?;
        table.line(offset)
    }

    /// Returns the file that an instruction lies in, its table, and the offset there.
    fn find(
        &mut self,
        space: &AddressSpace,
        instruction: u64,
    ) -> Option<(Rc<str>, &SymbolTable, u64)> {
        let mapping = space.file_at(instruction)?;
        let (file, offset) =
            (mapping.name.clone(), instruction - mapping.range.start + mapping.offset);
        let table = self.tables.entry(file.clone());
        let table = table.or_insert_with(|| SymbolTable::read(&file).unwrap_or_default());
        Some((file, table, offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::places::PlaceList;

    #[test]
    fn an_own_function_has_its_name() {
        let mut space = AddressSpace::new(std::process::id());
        let code = an_own_function_has_its_name as *const () as u64;
        space.look_up(code, &mut PlaceList::default());
        let found = Symbols::default().function(&space, code);
        assert!(found.name.unwrap().ends_with("an_own_function_has_its_name"));
        let line = Symbols::default().line(&space, code).expect("tests have debug information");
        assert!(line.file.ends_with("symbols.rs") && line.line > 100, "{line:?}");
        let nowhere = Symbols::default().function(&space, 0x10);
        assert_eq!(nowhere, Function { name: None, file: None });
    }
}
