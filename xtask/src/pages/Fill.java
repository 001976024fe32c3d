/** Fills a heap, says "up" and stays for a while. */
public class Fill {
    public static void main(String[] arguments) throws Exception {
        byte[][] kept = new byte[160][];
        for (int i = 0; i < kept.length; i++) {
            kept[i] = new byte[1 << 20];
            java.util.Arrays.fill(kept[i], (byte) 1);
        }
        System.out.println("up");
        Thread.sleep(4000);
        System.out.println(kept.length);
    }
}
