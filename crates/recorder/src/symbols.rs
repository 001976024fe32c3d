//! Names of functions, from the symbol tables of mapped files.
//!
//! Invariant: each file is read once, even if it cannot be read or has no symbols.

use crate::places::AddressSpace;
use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind};
use std::collections::HashMap;
use std::rc::Rc;

/// The function and file of an instruction.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Function {
    /// The demangled name; none if the file has no symbol there, and for generated code.
    pub name: Option<String>,
    /// The path of the file; none for generated code.
    pub file: Option<Rc<str>>,
}

/// The address in the file, the length and the name of a function.
type Symbol = (u64, u64, String);

/// The text symbols of one file.
#[derive(Debug, Default)]
struct SymbolTable {
    /// The symbols, in the order of addresses.
    symbols: Vec<Symbol>,
    /// Segments: file offset, length, address.
    segments: Vec<(u64, u64, u64)>,
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
        Some(SymbolTable { symbols, segments: segments.collect() })
    }

    fn name(&self, offset: u64) -> Option<&str> {
        let (start, _, address) = self
            .segments
            .iter()
            .find(|(start, length, _)| (*start..start + length).contains(&offset))?;
        let at = offset - start + address;
        let after = self.symbols.partition_point(|(start, ..)| *start <= at);
        let (start, size, name) = self.symbols.get(after.checked_sub(1)?)?;
        // Assembly symbols often have no size: they end at the next one.
        (*size == 0 || at < start + size).then_some(name)
    }
}

/// A cache of symbol tables by file.
#[derive(Debug, Default)]
pub struct Symbols {
    tables: HashMap<Rc<str>, SymbolTable>,
}

impl Symbols {
    /// Returns the function that contains an instruction.
    pub fn function(&mut self, space: &AddressSpace, instruction: u64) -> Function {
        let Some(mapping) = space.file_at(instruction) else {
            return Function { name: None, file: None };
        };
        let file = mapping.name.clone();
        let table = self.tables.entry(file.clone());
        let table = table.or_insert_with(|| SymbolTable::read(&file).unwrap_or_default());
        let name = table.name(instruction - mapping.range.start + mapping.offset);
        let name = name.map(|name| format!("{:#}", rustc_demangle::demangle(name)));
        Function { name, file: Some(file) }
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
        let nowhere = Symbols::default().function(&space, 0x10);
        assert_eq!(nowhere, Function { name: None, file: None });
    }
}
