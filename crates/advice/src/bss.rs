//! Large pages for the program's bss: the part of its data that is in no file.

/// Advises it, if it can hold a large page.
pub fn advise() {
    for (start, end) in ranges() {
        if end - start >= 2 << 20 {
            // SAFETY: the range is mapped by the kernel for the program; the advice changes no contents.
            unsafe { libc::madvise(start as *mut _, end - start, libc::MADV_HUGEPAGE) };
        }
    }
}

/// Whole base pages of each segment of the program that lie behind its part of the file.
fn ranges() -> impl Iterator<Item = (usize, usize)> {
    let base = crate::system::base_page() as usize;
    let headers = program_headers();
    let own = headers.iter().find(|header| header.p_type == libc::PT_PHDR);
    // Where the program was loaded: the headers' address less the one that they were linked for.
    let bias = own.map_or(0, |own| (headers.as_ptr() as usize).wrapping_sub(own.p_vaddr as usize));
    headers.iter().filter_map(move |header| {
        let start = bias.wrapping_add(header.p_vaddr as usize);
        let file_end = start.wrapping_add(header.p_filesz as usize).next_multiple_of(base);
        let end = start.wrapping_add(header.p_memsz as usize).next_multiple_of(base);
        (header.p_type == libc::PT_LOAD && file_end < end).then_some((file_end, end))
    })
}

fn program_headers() -> &'static [libc::Elf64_Phdr] {
    // SAFETY: getauxval has no preconditions. The kernel says there where it has mapped the program's
    // headers, and how many there are; they stay for as long as the process lives.
    unsafe {
        let (first, count) = (libc::getauxval(libc::AT_PHDR), libc::getauxval(libc::AT_PHNUM));
        let size = libc::getauxval(libc::AT_PHENT) as usize;
        if first == 0 || size != size_of::<libc::Elf64_Phdr>() {
            return &[];
        }
        std::slice::from_raw_parts(first as *const libc::Elf64_Phdr, count as usize)
    }
}
