//! Huge pages for the program's bss: the part of its data that is not in the file.

/// Advises huge pages for each range of bss that is at least 2 MiB long.
pub fn advise() {
    for (start, end) in ranges() {
        if end - start >= 2 << 20 {
            // SAFETY: the kernel has mapped the range for the program; the advice changes no contents.
            unsafe { libc::madvise(start as *mut _, end - start, libc::MADV_HUGEPAGE) };
        }
    }
}

/// Returns the whole base pages of each segment of the program that are not in the file.
fn ranges() -> impl Iterator<Item = (usize, usize)> {
    let base = crate::system::base_page() as usize;
    let headers = program_headers();
    let own = headers.iter().find(|header| header.p_type == libc::PT_PHDR);
    // The load bias: the headers' address less the address that they were linked for.
    let bias = own.map_or(0, |own| (headers.as_ptr() as usize).wrapping_sub(own.p_vaddr as usize));
    headers.iter().filter_map(move |header| {
        let start = bias.wrapping_add(header.p_vaddr as usize);
        let file_end = start.wrapping_add(header.p_filesz as usize).next_multiple_of(base);
        let end = start.wrapping_add(header.p_memsz as usize).next_multiple_of(base);
        (header.p_type == libc::PT_LOAD && file_end < end).then_some((file_end, end))
    })
}

fn program_headers() -> &'static [libc::Elf64_Phdr] {
    // SAFETY: getauxval has no preconditions. The kernel passes the address of the program's headers and
    // their number. They stay mapped as long as the process lives.
    unsafe {
        let (first, count) = (libc::getauxval(libc::AT_PHDR), libc::getauxval(libc::AT_PHNUM));
        let size = libc::getauxval(libc::AT_PHENT) as usize;
        if first == 0 || size != size_of::<libc::Elf64_Phdr>() {
            return &[];
        }
        std::slice::from_raw_parts(first as *const libc::Elf64_Phdr, count as usize)
    }
}
