//! The words of all tables: quantities with their unit, readings with their provenance.

use comfy_table::{CellAlignment, Table, presets};

/// A table without lines, indented, its headings first. Columns of numbers are right-aligned.
pub fn table(headings: &[&str], numeric: &[usize], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    if headings.iter().any(|heading| !heading.is_empty()) {
        table.set_header(headings.to_vec());
    }
    table.add_rows(rows);
    for column in numeric {
        if let Some(column) = table.column_mut(*column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines = table.lines().map(|line| format!(" {}\n", line.trim_end()));
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align_numbers_to_the_right() {
        let rows = vec![vec!["a".into(), "1".into()], vec!["b".into(), "100".into()]];
        assert_eq!(table(&["id", "value"], &[1], rows), "  id  value\n  a       1\n  b     100\n");
    }
}
