//! Traces as Parquet, for analysis elsewhere: a row for each change of page.

use super::code::Step;
use super::{Trace, TraceError};
use crate::filter::PAGE_SHIFT;
use parquet::basic::{Compression, Encoding};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Addresses are those of pages; unmapped pages are not listed.
const SCHEMA: &str = "message page_changes {
    REQUIRED INT32 process (INTEGER(32, false));
    REQUIRED INT32 thread (INTEGER(32, false));
    REQUIRED BYTE_ARRAY kind (STRING);
    REQUIRED INT64 address (INTEGER(64, false));
}";
/// Blocks in a row group.
const GROUP_BLOCKS: usize = 16;

#[derive(Default)]
struct Rows {
    process: Vec<i32>,
    thread: Vec<i32>,
    kind: Vec<ByteArray>,
    address: Vec<i64>,
}

/// Writes all changes of page into a file; how many.
///
/// # Errors
/// A damaged block, or a file that cannot be written.
pub fn to_parquet(trace: &Trace, path: &Path) -> Result<u64, TraceError> {
    let failed = |error: ParquetError| TraceError::Export(path.into(), error.to_string());
    let file =
        File::create(path).map_err(|error| TraceError::Export(path.into(), error.to_string()))?;
    let schema = Arc::new(parse_message_type(SCHEMA).map_err(failed)?);
    let properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_column_dictionary_enabled("address".into(), false)
        .set_column_encoding("address".into(), Encoding::DELTA_BINARY_PACKED)
        .build();
    let mut writer =
        SerializedFileWriter::new(file, schema, Arc::new(properties)).map_err(failed)?;
    let (names, mut count) = (["load", "chase", "store", "fetch"].map(ByteArray::from), 0);
    for first in (0..trace.blocks()).step_by(GROUP_BLOCKS) {
        let mut rows = Rows::default();
        for number in first..trace.blocks().min(first + GROUP_BLOCKS) {
            let block = trace.block(number)?;
            for step in block.steps() {
                let Step::Change(kind, page) = step else { continue };
                rows.process.push(block.info.process as i32);
                rows.thread.push(block.info.thread as i32);
                rows.kind.push(names[kind as usize].clone());
                rows.address.push((page << PAGE_SHIFT) as i64);
            }
        }
        count += rows.address.len() as u64;
        let group = writer.next_row_group().map_err(failed)?;
        write(group, &rows).map_err(failed)?;
    }
    writer.close().map_err(failed)?;
    Ok(count)
}

fn write(mut group: SerializedRowGroupWriter<'_, File>, rows: &Rows) -> Result<(), ParquetError> {
    column::<Int32Type>(&mut group, &rows.process)?;
    column::<Int32Type>(&mut group, &rows.thread)?;
    column::<ByteArrayType>(&mut group, &rows.kind)?;
    column::<Int64Type>(&mut group, &rows.address)?;
    group.close().map(|_| ())
}

fn column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, File>,
    values: &[T::T],
) -> Result<(), ParquetError> {
    if let Some(mut column) = group.next_column()? {
        column.typed::<T>().write_batch(values, None, None)?;
        column.close()?;
    }
    Ok(())
}
